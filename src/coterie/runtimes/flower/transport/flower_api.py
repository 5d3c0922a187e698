"""Every name of Flower 1.41 that Coterie uses, except those with which guard.py starts a SuperLink.

Few of them are promised by Flower: an upgrade begins here. Unless told not to, Flower writes to ~/.flwr, asks for
updates, sends telemetry and installs packages an app names; some of that is decided when it is imported.
"""

import os

from coterie.errors import CoterieError
from coterie.runtimes.flower.transport.base import QUIET

os.environ.update(QUIET)

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, Metadata, RecordDict
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SubStatus
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto import control_pb2 as control
    from flwr.proto import fleet_pb2 as fleet
    from flwr.proto import message_pb2 as objects
    from flwr.proto import runtime_pb2 as runtime
    from flwr.proto.fab_pb2 import Fab
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node as NodeId
    from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_body,
        get_object_head_values_from_object_content,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflatable_class_registry
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
except ImportError as e:
    raise CoterieError('a federation needs the extra "flower": pip install coterie[flower]') from e


__all__ = [
    "SUPERLINK_NODE_ID", "TASK_TOKEN_HEADER", "Array", "ArrayRecord", "ConfigRecord", "ControlHttpClient", "Error",
    "ErrorCode", "Fab", "FleetHttpClient", "Message", "MessageType", "Metadata", "NodeAuthHttpInterceptor", "NodeId",
    "RecordDict", "RuntimeHttpClient", "RuntimeVersionHttpInterceptor", "SendNodeHeartbeatRequest", "SubStatus",
    "TaskType", "control", "fleet", "get_all_nested_objects", "get_object_body",
    "get_object_head_values_from_object_content", "get_object_tree", "inflatable_class_registry", "make_message",
    "message_from_proto", "message_to_proto", "no_object_id_recompute", "objects", "public_key_to_bytes",
    "remove_content_from_message", "runtime",
]  # fmt: skip
