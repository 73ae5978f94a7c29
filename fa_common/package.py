"""A package in which functions keep the names that they share with modules.

`fa3.forward` is a function and fa3/forward.py a module. Python imports that module with the first kernel and would then
put it in the function's place.
"""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and callable(self.__dict__.get(name))):
            super().__setattr__(name, value)


def keep_functions(package: str) -> None:
    """From here on, importing a module of `package` replaces none of its functions.

    `from fa3.forward import Forward` and `importlib.import_module("fa3.forward")` still find the module.
    """
    sys.modules[package].__class__ = _Package
