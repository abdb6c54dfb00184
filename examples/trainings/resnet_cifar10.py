"""ResNet-18 on CIFAR-10, with its output divided by gamma: large is rich, small is lazy.

    python examples/trainings/resnet_cifar10.py --gamma 1

SGD with momentum and weight decay, random crops, 50,000 images. 3 to 5 minutes on an H200 with other work; needs the
files of CIFAR-10 in FEATLEARN_DATA.
"""

import torch
from classification import DEVICE, Training, arguments, images, told, train

import featlearn as fl
from featlearn.models import ResNet18


def main() -> None:
    """Train and tell."""
    parser = arguments(__doc__, "resnet-cifar10")
    parser.add_argument("--gamma", type=float, default=1.0, help="divisor of the output (%(default)s)")
    parser.add_argument("--epochs", type=int, default=25)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    data = images("cifar10", 50_000, 10_000, given.smoke)
    network = ResNet18(width=8 if given.smoke else 64).to(DEVICE)
    model = fl.steer.scale_output(network, 1 / given.gamma)
    training = Training(epochs=1, batch=32, lr=0.05) if given.smoke else Training(given.epochs, batch=256, lr=0.1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = training.lr * model.rate_factor
    optimizer = torch.optim.SGD(trained, rate, momentum=0.9, nesterov=True, weight_decay=5e-4 / max(1, given.gamma**2))
    settings = {"gamma": given.gamma, "seed": given.seed}
    told(train(model, data, optimizer, training, given.out, settings))


if __name__ == "__main__":
    main()
