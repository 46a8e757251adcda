"""Lets `import torchvision` succeed next to a CPU build of torch, for the tests of SGLang.

FAKED: the schemas of two image operators. The published torchvision wheel is a CUDA build: beside a CPU torch its
compiled operators do not load, and its import fails where it registers fake kernels for `nms` and `qnms`. Declaring
the two is enough. They are never called: nothing here has images.
"""

import sys


class _DeclareBeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        global _library  # must live as long as the process
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                _library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DeclareBeforeTorchvision())
