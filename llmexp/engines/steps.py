"""The engine's steps as it recorded them (`engine.record_steps`), cut into rounds."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from llmexp.engines.recorded import COLUMNS


def steps_of_round(file: Path, round_index: int, origin_monotonic_s: float) -> pa.Table:
    """The steps scheduled since a round's origin, one row each, times counted from the origin as in the trace.

    Columns: `round` and those of `llmexp.engines.recorded`. A line that is not whole yet is left out.
    """
    whole = b"".join(file.read_bytes().rpartition(b"\n")[:2])
    types = {name: pa.float64() if name.endswith("_s") else pa.int64() for name in COLUMNS}
    steps = csv.read_csv(pa.BufferReader(whole), convert_options=csv.ConvertOptions(column_types=types))
    steps = steps.filter(pc.greater_equal(steps["scheduled_s"], origin_monotonic_s))
    for name in ("scheduled_s", "start_s"):
        column = steps.schema.get_field_index(name)
        steps = steps.set_column(column, name, pc.subtract(steps[name], origin_monotonic_s))
    return steps.add_column(0, "round", pa.array(np.full(len(steps), round_index, np.int32)))
