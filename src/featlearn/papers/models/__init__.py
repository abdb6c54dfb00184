"""The networks of the five papers, with weights drawn by a generator."""

from featlearn.papers.models.cnn import CNN
from featlearn.papers.models.gpt import GPT
from featlearn.papers.models.mlp import MLP
from featlearn.papers.models.resnet18 import ResNet18
from featlearn.papers.models.vgg11 import VGG11
from featlearn.papers.models.wide_resnet import WideResNet

__all__ = ["CNN", "GPT", "MLP", "VGG11", "ResNet18", "WideResNet"]
