"""Damage to files, drawn by Hypothesis."""

from typing import Any

from hypothesis import strategies as st


def mutated(data: Any, original: bytes, others: list[bytes]) -> bytes:
    """Some bytes changed, the end cut off, something put between, or the content of another file."""
    content = bytearray(original)
    kind = data.draw(st.sampled_from(["bytes", "cut", "insert", "other file"]))
    if kind == "bytes":
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif kind == "insert":
        at = data.draw(st.integers(0, len(content)))
        content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
    else:
        content = bytearray(data.draw(st.sampled_from(others)))
    return bytes(content)
