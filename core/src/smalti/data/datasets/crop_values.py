"""Values of the keys of a dataset that set the size at which its images are trained, and how they are cropped."""

from typing import Literal

ResolutionType = Literal["pixel", "area", "pixel_area"]
CropStyle = Literal["center", "random", "corner"]
CropAspect = Literal["square", "preserve", "closest", "random"]
