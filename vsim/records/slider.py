"""A figure of loss against time with sliders for bandwidth and latency, in a notebook."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vsim.extras import extra
from vsim.network import Network
from vsim.network.links import delay, rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sliders(draw: Callable[[Network], Figure], collective: str) -> Any:
    """Return a widget: sliders over the figure that `draw` makes of the network that they say."""
    widgets = extra("ipywidgets", "a slider", "ipywidgets", "notebook")
    wide = {"layout": {"width": "420px"}, "style": {"description_width": "80px"}, "continuous_update": False}
    bandwidth = widgets.FloatLogSlider(2e8, min=5, max=11, step=0.05, description="bandwidth", readout=False, **wide)
    latency = widgets.FloatLogSlider(0.01, min=-4, max=0, step=0.05, description="latency", readout=False, **wide)
    said, picture = widgets.Label(), widgets.Image(format="png", width=620)

    def show(_: Any = None) -> None:
        network = Network(bandwidth.value, latency.value, collective=collective)
        said.value = f"{rate(bandwidth.value)}, {delay(latency.value)}, {collective}"
        image = io.BytesIO()
        draw(network).savefig(image, format="png", dpi=150)
        picture.value = image.getvalue()

    for slider in (bandwidth, latency):
        slider.observe(show, "value")
    show()
    return widgets.VBox([bandwidth, latency, said, picture])
