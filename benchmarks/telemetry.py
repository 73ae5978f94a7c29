"""The GPU's clock and power while it works: under load power decides the clock, and the clock decides the rate."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Reading:
    sm_clock_mhz: float | None = None
    power_w: float | None = None


class Telemetry:
    """Reads torch's current device by NVML; where that cannot be done, readings are empty and `why_not` says why."""

    def __init__(self):
        self.why_not = None
        try:
            import pynvml
        except ImportError:
            self.why_not = "nvidia-ml-py is not installed"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            # By UUID: NVML numbers every GPU of the machine, torch only those that CUDA_VISIBLE_DEVICES leaves.
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._read()
        except pynvml.NVMLError as error:
            self.why_not = f"NVML: {error}"

    def read(self) -> Reading:
        """The clock now and the power now; a fraction of a millisecond."""
        if self.why_not:
            return Reading()
        try:
            return self._read()
        except self._nvml.NVMLError:
            return Reading()

    def _read(self) -> Reading:
        clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
        # The usual power query is a mean over a second, longer than one version's turn; this field is the present.
        [field] = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])
        watts = field.value.uiVal / 1000 if field.nvmlReturn == self._nvml.NVML_SUCCESS else None
        return Reading(float(clock), watts)
