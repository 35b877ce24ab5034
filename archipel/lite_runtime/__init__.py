"""The device's runtime: predict, evaluate and keep learning with nothing but ONNX Runtime."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.loading import load
from archipel.lite_runtime.runtime import Runtime
from archipel.lite_runtime.training.control import Control
from archipel.lite_runtime.training.results import History, LocalUpdate, Progress

if TYPE_CHECKING:
    from archipel.lite_runtime.choice import Choice as Choice
    from archipel.lite_runtime.choice import choose as choose
    from archipel.lite_runtime.interface import ModelRuntime as ModelRuntime
    from archipel.lite_runtime.isolated.runtime import IsolatedRuntime as IsolatedRuntime
    from archipel.lite_runtime.profile import Profile as Profile
    from archipel.lite_runtime.slots.folder import running_slot as running_slot
    from archipel.lite_runtime.slots.model_slots import Slots as Slots
    from archipel.lite_runtime.store.example_store import ExampleStore as ExampleStore

__all__ = [
    "Choice",
    "Control",
    "DeviceState",
    "ExampleStore",
    "History",
    "IsolatedRuntime",
    "LocalUpdate",
    "ModelRuntime",
    "Profile",
    "Progress",
    "Runtime",
    "Slots",
    "choose",
    "load",
    "running_slot",
]

# Imported on first use: a device that only predicts starts without them.
_LATER = {
    "Choice": "choice",
    "ExampleStore": "store.example_store",
    "IsolatedRuntime": "isolated.runtime",
    "ModelRuntime": "interface",
    "Profile": "profile",
    "Slots": "slots.model_slots",
    "choose": "choice",
    "running_slot": "slots.folder",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
