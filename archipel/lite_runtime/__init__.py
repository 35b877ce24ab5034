"""The device's runtime: predict, evaluate and keep learning with nothing but ONNX Runtime."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from archipel.lite_runtime.control import Control
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.results import History, LocalUpdate, Progress
from archipel.lite_runtime.runtime import Runtime, load

if TYPE_CHECKING:
    from archipel.lite_runtime.isolated import IsolatedRuntime as IsolatedRuntime
    from archipel.lite_runtime.profile import Profile as Profile
    from archipel.lite_runtime.slot_folder import running_slot as running_slot
    from archipel.lite_runtime.slots import Slots as Slots
    from archipel.lite_runtime.store import ExampleStore as ExampleStore

__all__ = [
    "Control",
    "DeviceState",
    "ExampleStore",
    "History",
    "IsolatedRuntime",
    "LocalUpdate",
    "Profile",
    "Progress",
    "Runtime",
    "Slots",
    "load",
    "running_slot",
]

# Imported when asked for: a device that only predicts starts without them.
_LATER = {
    "ExampleStore": "store",
    "IsolatedRuntime": "isolated",
    "Profile": "profile",
    "Slots": "slots",
    "running_slot": "slot_folder",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
