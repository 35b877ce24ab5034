"""The device's runtime: predict, evaluate and keep learning with nothing but ONNX Runtime."""

from archipel.lite_runtime.control import Control
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.results import History, LocalUpdate, Progress
from archipel.lite_runtime.runtime import Runtime, load

__all__ = ["Control", "DeviceState", "History", "LocalUpdate", "Progress", "Runtime", "load"]
