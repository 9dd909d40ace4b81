"""Makes tests/support/pipeline.py importable as `pipeline_support`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if "pipeline_support" not in sys.modules:
    _spec = spec_from_file_location("pipeline_support", Path(__file__).parents[1] / "support" / "pipeline.py")
    assert _spec is not None
    assert _spec.loader is not None
    _module = module_from_spec(_spec)
    sys.modules["pipeline_support"] = _module
    _spec.loader.exec_module(_module)
