"""Parts of a cache as earlier versions wrote them."""

from pathlib import Path

from smalti.checkpoint import NAMES, Chunk, encode_header


def earlier_part(path: Path, entries) -> None:
    """A part as earlier versions wrote it."""
    tensors = [(f"{key}/{name}", tensor) for key, entry in entries.items() for name, tensor in entry.items()]
    chunks = [(name, Chunk(dtype=NAMES[t.dtype], shape=tuple(t.shape), offsets=(0,) * t.ndim)) for name, t in tensors]
    data = b"".join(tensor.numpy().tobytes() for _, tensor in tensors)
    path.write_bytes(encode_header(chunks, plain=True) + data)
