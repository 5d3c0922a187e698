"""Hypothesis strategies for everything that the codec writes."""

import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip
tensors = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)
numbers = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(DTYPES)
values = st.recursive(
    numbers | tensors,
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.just("t"), v, max_size=3)
        | st.dictionaries(st.integers(0, 99), v, max_size=3)
    ),
    max_leaves=8,
)
