"""Say in plain words why this Python cannot make the project's .venv; it must itself run on any Python 3.6 or later."""

import sys

OLDEST, NEWEST = (3, 11), (3, 13)


def complaint(version, has_venv):
    """What is wrong with a Python of that (major, minor), and what to do about it; empty if nothing is."""
    name = "{}.{}".format(*version)
    if not OLDEST <= version <= NEWEST:
        return f"Python 3.11 to 3.13 is needed, {sys.executable} is Python {name}. Name another: make PYTHON=python3.12"
    if not has_venv:
        return (
            f"{sys.executable} comes without venv or ensurepip, so it cannot make .venv. "
            f"On Debian or Ubuntu: apt-get install python{name}-venv"
        )
    return ""


def has_venv():
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    text = complaint(sys.version_info[:2], has_venv())
    if text:
        sys.exit(text)
