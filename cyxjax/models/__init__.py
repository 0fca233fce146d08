"""Ready-made networks, layers to build others from, and models as files.

Names are loaded on first use (PEP 562): asking for a network's name or a Config must not start jax.
"""

from typing import TYPE_CHECKING

from cyxjax import _lazy

_FILES = {  # module of cyxjax -> the public names it holds
    "models.convolution": "AvgPool2DModule Conv2DModule GlobalAvgPoolModule MaxPool2DModule max_pool",
    "models.files": "save_model",
    "models.layers": "DropoutModule ELUModule EmbeddingModule FlattenModule GELUModule Layer LeakyReLUModule "
    "LinearModule LogSoftmaxModule ReLUModule ReshapeModule SiLUModule SigmoidModule SoftmaxModule "
    "TanhModule count_params layer",
    "models.norms": "BatchNormModule GroupNormModule LayerNormModule",
    "models.registry": "Builder Config get_model model_names register",
    "models.saved": "SavedModel build_model load_model",
    "models.sequential": "SequentialModel",
}

if TYPE_CHECKING:  # for editors and type checkers; a test holds this equal to the table above
    from cyxjax.models.convolution import AvgPool2DModule as AvgPool2DModule
    from cyxjax.models.convolution import Conv2DModule as Conv2DModule
    from cyxjax.models.convolution import GlobalAvgPoolModule as GlobalAvgPoolModule
    from cyxjax.models.convolution import MaxPool2DModule as MaxPool2DModule
    from cyxjax.models.convolution import max_pool as max_pool
    from cyxjax.models.files import save_model as save_model
    from cyxjax.models.layers import DropoutModule as DropoutModule
    from cyxjax.models.layers import ELUModule as ELUModule
    from cyxjax.models.layers import EmbeddingModule as EmbeddingModule
    from cyxjax.models.layers import FlattenModule as FlattenModule
    from cyxjax.models.layers import GELUModule as GELUModule
    from cyxjax.models.layers import Layer as Layer
    from cyxjax.models.layers import LeakyReLUModule as LeakyReLUModule
    from cyxjax.models.layers import LinearModule as LinearModule
    from cyxjax.models.layers import LogSoftmaxModule as LogSoftmaxModule
    from cyxjax.models.layers import ReLUModule as ReLUModule
    from cyxjax.models.layers import ReshapeModule as ReshapeModule
    from cyxjax.models.layers import SigmoidModule as SigmoidModule
    from cyxjax.models.layers import SiLUModule as SiLUModule
    from cyxjax.models.layers import SoftmaxModule as SoftmaxModule
    from cyxjax.models.layers import TanhModule as TanhModule
    from cyxjax.models.layers import count_params as count_params
    from cyxjax.models.layers import layer as layer
    from cyxjax.models.norms import BatchNormModule as BatchNormModule
    from cyxjax.models.norms import GroupNormModule as GroupNormModule
    from cyxjax.models.norms import LayerNormModule as LayerNormModule
    from cyxjax.models.registry import Builder as Builder
    from cyxjax.models.registry import Config as Config
    from cyxjax.models.registry import get_model as get_model
    from cyxjax.models.registry import model_names as model_names
    from cyxjax.models.registry import register as register
    from cyxjax.models.saved import SavedModel as SavedModel
    from cyxjax.models.saved import build_model as build_model
    from cyxjax.models.saved import load_model as load_model
    from cyxjax.models.sequential import SequentialModel as SequentialModel
else:
    __all__, __getattr__, __dir__ = _lazy(__name__, _FILES)
