"""The diagnosis of a watched run in plain words, with its evidence: `diagnose(run)`."""

from featlearn.diagnosis.advice import Advice, Change, advise
from featlearn.diagnosis.evidence import Evidence
from featlearn.diagnosis.layers import LayerLearning, LayerPairMechanism
from featlearn.diagnosis.machine import KernelMachine
from featlearn.diagnosis.verdict import Diagnosis, diagnose

__all__ = [
    "Advice",
    "Change",
    "Diagnosis",
    "Evidence",
    "KernelMachine",
    "LayerLearning",
    "LayerPairMechanism",
    "advise",
    "diagnose",
]
