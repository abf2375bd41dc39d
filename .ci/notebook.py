"""Run tutorial.ipynb from top to bottom; any error ends it. With --store, keep the outputs, else check them.

The stored outputs carry the hash of the code that made them (metadata.executed). The check fails if a code
cell was changed since, was left out, or was run in another order.
"""
import hashlib
import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

path = Path(__file__).parents[1] / "tutorial.ipynb"
stored = nbformat.read(path, 4)
nbformat.validate(stored)
cells = [cell for cell in stored.cells if cell.cell_type == "code"]
code = hashlib.sha256(json.dumps([cell.source for cell in cells]).encode()).hexdigest()
if "--store" not in sys.argv:
    order = [cell.execution_count for cell in cells]
    if stored.metadata.get("executed") != code or order != [*range(1, len(cells) + 1)]:
        sys.exit("tutorial.ipynb: its code did not make its outputs; run `python .ci/notebook.py --store`.")
    if any(output.output_type == "error" for cell in cells for output in cell.outputs):
        sys.exit("tutorial.ipynb: an error is stored in it; run `python .ci/notebook.py --store`.")
NotebookClient(stored, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
if "--store" in sys.argv:
    for cell in stored.cells:
        cell.metadata.pop("execution", None)  # when it ran
    stored.metadata.pop("language_info", None)
    stored.metadata["executed"] = code
    path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
print(f"tutorial.ipynb: {len(cells)} code cells ran without an error.")
