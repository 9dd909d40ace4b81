"""Makes the targets and seeds importable as `fuzz_targets` and `fuzz_seeds`."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if "fuzz_targets" not in sys.modules:
    for _name, _file in (("fuzz_targets", "targets.py"), ("fuzz_seeds", "seeds.py")):
        _spec = spec_from_file_location(_name, Path(__file__).with_name(_file))
        assert _spec is not None
        assert _spec.loader is not None
        _module = module_from_spec(_spec)
        sys.modules[_name] = _module
        _spec.loader.exec_module(_module)
