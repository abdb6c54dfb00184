"""Networks of the five papers, with weights drawn from a generator."""

from featlearn.models.cnn import CNN
from featlearn.models.gpt import GPT
from featlearn.models.mlp import MLP
from featlearn.models.resnet18 import ResNet18
from featlearn.models.vgg11 import VGG11
from featlearn.models.wide_resnet import WideResNet

__all__ = ["CNN", "GPT", "MLP", "VGG11", "ResNet18", "WideResNet"]
