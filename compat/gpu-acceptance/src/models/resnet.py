"""ResNet-18 and ResNet-50."""

from trainmaster.models.resnet import ResNet, resnet18, resnet50

__all__ = ["ResNet", "resnet18", "resnet50"]
