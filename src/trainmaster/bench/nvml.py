"""Clock, temperature, power, throttling and memory errors of a GPU while it works, from NVIDIA's own library.

Through ctypes: a node has libnvidia-ml wherever it has a driver, and nothing needs to be installed. A sensor that does
not answer gives None in its place; without the library there is no sensor, and the probe goes on without.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
# nvml.h, nvmlClocksEventReason*: bit → what slows the GPU down.
THROTTLE = {
    0x04: "power_cap",  # its power limit; usual under full load
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",  # the server pulled it down from outside
}
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_CORRECTED, _UNCORRECTED, _SINCE_BOOT = 0, 1, 0  # nvmlMemoryErrorType_t, nvmlEccCounterType_t


class _Utilisation(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Sensor:
    """One GPU of an opened library."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def sample(self) -> dict[str, Any]:
        """Everything now. Takes about a millisecond."""
        reasons = self._query("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        power = self._query("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        return {
            "sm_mhz": self._query("nvmlDeviceGetClockInfo", ctypes.c_uint, _SM),
            "memory_mhz": self._query("nvmlDeviceGetClockInfo", ctypes.c_uint, _MEMORY),
            "temperature_c": self._query("nvmlDeviceGetTemperature", ctypes.c_uint, 0),
            "power_w": None if power is None else round(power / 1000, 1),
            "throttle": None if reasons is None else name_reasons(reasons),
        }

    def utilisation(self) -> int | None:
        """Per cent of the last period in which a kernel ran."""
        answer = _Utilisation()
        try:
            status = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(answer))
        except AttributeError:
            return None
        return int(answer.gpu) if status == 0 else None

    def memory_errors(self) -> dict[str, int | None]:
        """ECC errors since the driver was loaded."""
        function = "nvmlDeviceGetTotalEccErrors"
        return {
            "corrected": self._query(function, ctypes.c_ulonglong, _CORRECTED, _SINCE_BOOT),
            "uncorrected": self._query(function, ctypes.c_ulonglong, _UNCORRECTED, _SINCE_BOOT),
        }

    def _query(self, function: str, kind: type[Any], *arguments: int) -> int | None:
        answer = kind()
        try:
            status = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(answer))
        except AttributeError:
            return None  # a library of another age
        return int(answer.value) if status == 0 else None


def open_sensor(device: torch.device) -> Sensor | None:
    """The sensor of this device, or None where there is none to ask."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    if uuid is None:
        return None
    try:
        library = ctypes.CDLL(LIBRARY)
        handle = ctypes.c_void_p()
        name = f"GPU-{str(uuid).removeprefix('GPU-')}".encode()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None
    return Sensor(library, handle)


def name_reasons(bits: int) -> list[str]:
    """The names of what slows a GPU down; idle and user-set clocks are none."""
    return [name for bit, name in THROTTLE.items() if bits & bit]
