"""Start-up code of every Python process under `ddpobs run`, also of a tool for an older Python that a training starts.

So every version of Python must be able to read this file, from 2.7 on. Where torch's versions with DDP run, it runs
`patches.py`. Then it runs the sitecustomize that it hides, if there is one, under its own name.
"""

import os
import sys

_folder = os.path.dirname(os.path.abspath(__file__))
_paths = [_path for _path in sys.path if os.path.abspath(_path or ".") != _folder]
try:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec, spec_from_file_location
except ImportError:  # Python 2.
    import imp  # type: ignore[import-not-found,unused-ignore]

    try:
        _found = imp.find_module("sitecustomize", _paths)
    except ImportError:
        pass
    else:
        imp.load_module("sitecustomize", *_found)  # type: ignore[arg-type,unused-ignore]
else:
    if sys.version_info >= (3, 8):
        _spec = spec_from_file_location("_ddpobs_autoload", os.path.join(_folder, "patches.py"))
        _spec.loader.exec_module(module_from_spec(_spec))  # type: ignore[union-attr,arg-type]
    _spec = PathFinder.find_spec("sitecustomize", _paths)
    if _spec is not None and _spec.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules["sitecustomize"])
