"""nbformat, imported without the grammar that would take longer than all the rest of the import.

nbformat imports jsonschema, and that imports rfc3987_syntax, if it is there (JupyterLab's server brings it), to check
internationalised addresses. It builds a grammar on the way: 1.6 of the 1.8 seconds that `import nbformat` took, in each
kernel. Nothing here checks such an address, and jsonschema does without where the package is missing.
"""

import sys

GRAMMAR = "rfc3987_syntax"

_hidden = GRAMMAR not in sys.modules
if _hidden:
    sys.modules[GRAMMAR] = None  # what makes an import fail
try:
    import nbformat
finally:
    if _hidden:
        del sys.modules[GRAMMAR]

__all__ = ["nbformat"]
