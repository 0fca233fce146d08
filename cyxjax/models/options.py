"""Types of model options: what a value may be is written once, beside the option's name."""

from typing import Annotated, Literal

from pydantic import Field

Count = Annotated[int, Field(gt=0)]  # number of classes, layers, units
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]  # probability of dropping; 1 would drop everything
Positive = Annotated[float, Field(gt=0.0)]
Activation = Literal["relu", "gelu", "tanh", "silu"]
