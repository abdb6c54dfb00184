"""Small models of many packages against dense Jacobians: kernel, diagonal, session, and a copy in double precision.

Marked `zoo`. Models of packages that are not installed are skipped. Install packages without their dependencies where
they would replace torch.
"""

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import featlearn as fl
from featlearn.network.inputs import map_tensors

from ..references.jacobian import dense_ntk

P = 9
IN_SINGLE = 1e-6
"""Tolerance for models that compute in single precision whatever their weights are in."""


class Entry(NamedTuple):
    """A model of a package."""

    package: str
    name: str
    build: Callable[[Any], tuple[nn.Module, Any]]
    """Takes the package, gives a model and its inputs."""
    tolerance: float = 1e-9
    refused: str = ""
    """What the error must say where the model cannot be measured."""

    @property
    def id(self) -> str:
        return f"{self.package}-{self.name}"


def three(output: Any) -> Tensor:
    """Return three numbers of each sample's output, or fewer."""
    while not isinstance(output, Tensor):
        for key in ("logits", "last_hidden_state", "sample", "mean", "array", "tensor"):
            if hasattr(output, key):
                output = getattr(output, key)
                break
        else:
            output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    flat = (output.real if output.is_complex() else output).flatten(1)
    return flat[:, :: max(1, flat.shape[1] // 3)][:, :3]


def inner(package: Any, path: str) -> Any:
    """Return what lies in a package, at `module.name`."""
    module, _, name = path.rpartition(".")
    found = import_module(f"{package.__name__}.{module}") if module else package
    return getattr(found, name)


def images(size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(P, channels, size, size)


def sequence(length: int = 8, width: int = 8) -> Tensor:
    return torch.randn(P, length, width)


def tokens(length: int = 8, vocabulary: int = 16) -> Tensor:
    return torch.randint(1, vocabulary, (P, length))


class Graph(nn.Module):
    """A graph convolution with its edges, measured on graphs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 1, 2, 0], [1, 2, 3, 4, 0, 0, 1, 3]]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, self.edges))
        return x


class OneByOne(nn.Module):
    """A graph convolution that takes one graph at a time: all graphs of a batch as one with many parts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 1, 2, 0], [1, 2, 3, 4, 0, 0, 1, 3]]))

    def forward(self, x: Tensor) -> Tensor:
        samples, nodes, _ = x.shape
        shift = nodes * torch.arange(samples)[:, None, None]
        edges = (self.edges + shift).transpose(0, 1).flatten(1)
        return torch.tanh(self.layer(x.flatten(0, 1), edges)).view(samples, nodes, -1)


class Called(nn.Module):
    """A model called in its own way."""

    def __init__(self, model: nn.Module, call: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *x: Any) -> Any:
        return self.call(self.model, *x)


def made(path: str, x: Callable[[], Any], *args: Any, **settings: Any) -> Callable[[Any], tuple[nn.Module, Any]]:
    """Return what builds the class at a path in a package, and its inputs."""
    return lambda package: (inner(package, path)(*args, **settings), x())


ENTRIES: list[Entry] = []


def add(package: str, name: str, build: Callable[[Any], tuple[nn.Module, Any]], **more: Any) -> None:
    ENTRIES.append(Entry(package, name, build, **more))


for name in (
    "test_vit",
    "test_vit2",
    "test_vit3",
    "test_vit4",
    "test_resnet",
    "test_efficientnet",
    "test_convnext",
    "test_convnext2",
    "test_convnext3",
    "test_byobnet",
    "test_mambaout",
    "test_nfnet",
    "test_efficientnet_ln",
    "test_efficientnet_gn",
    "test_efficientnet_evos",
):
    more = {"img_size": 32} if "vit" in name else {}
    add("timm", name, lambda timm, name=name, more=more: (timm.create_model(name, num_classes=3, **more), images(32)))
small_vit = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "num_heads": 2, "num_classes": 3, "depth": 2}
add("timm", "cait", made("models.cait.Cait", images, **small_vit))
add("timm", "xcit", made("models.xcit.Xcit", images, **{**small_vit, "patch_size": 8}))
add(
    "timm",
    "mlp_mixer",
    made("models.mlp_mixer.MlpMixer", images, num_classes=3, img_size=16, patch_size=4, num_blocks=2, embed_dim=16),
)
add(
    "timm",
    "swin",
    made(
        "models.swin_transformer.SwinTransformer",
        images,
        img_size=16,
        patch_size=2,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
        num_classes=3,
    ),
)
add(
    "timm",
    "swin_v2",
    made(
        "models.swin_transformer_v2.SwinTransformerV2",
        images,
        img_size=16,
        patch_size=2,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
        num_classes=3,
    ),
)
add(
    "timm",
    "poolformer",
    made("models.metaformer.MetaFormer", lambda: images(32), depths=(1, 1), dims=(8, 16), num_classes=3),
)
add("timm", "beit", made("models.beit.Beit", images, **small_vit, init_values=0.1))
add("timm", "eva", made("models.eva.Eva", images, **small_vit, use_rot_pos_emb=True, swiglu_mlp=True))
for name in (
    "GCNConv",
    "SAGEConv",
    "GraphConv",
    "TAGConv",
    "ChebConv",
    "SGConv",
    "LEConv",
    "ClusterGCNConv",
    "ARMAConv",
    "MFConv",
    "GatedGraphConv",
    "GeneralConv",
):
    arguments = {"ChebConv": (4, 3, 2), "GatedGraphConv": (4, 2)}.get(name, (4, 3))
    add(
        "torch_geometric",
        name,
        lambda pyg, name=name, a=arguments: (OneByOne(inner(pyg, f"nn.{name}")(*a)), torch.randn(P, 5, 4)),
    )
for name in ("GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv", "FeaStConv", "ResGatedGraphConv"):
    add(
        "torch_geometric", name, lambda pyg, name=name: (OneByOne(inner(pyg, f"nn.{name}")(4, 3)), torch.randn(P, 5, 4))
    )
add(
    "torch_geometric",
    "fixed-edges",
    lambda pyg: (
        Graph(inner(pyg, "nn.GCNConv")(4, 6, cached=False), inner(pyg, "nn.GraphConv")(6, 3)),
        torch.randn(P, 5, 4),
    ),
)
add(
    "torch_geometric",
    "nodes-are-no-samples",
    lambda pyg: (Graph(inner(pyg, "nn.GCNConv")(4, 3)), torch.randn(P, 4)),
    refused=r"\(graphs, nodes, features\)|failed on x",
)
add(
    "torch_geometric",
    "GINConv",
    lambda pyg: (
        OneByOne(inner(pyg, "nn.GINConv")(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))),
        torch.randn(P, 5, 4),
    ),
)

XT = {"num_tokens": 16, "max_seq_len": 8}
for name, more in {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "relative": {"rel_pos_bias": True},
    "rmsnorm-glu": {"use_rmsnorm": True, "ff_glu": True},
    "sandwich": {"sandwich_norm": True},
    "qk-norm": {"attn_qk_norm": True},
    "talking": {"attn_pre_talking_heads": True},
    "multi-query": {"attn_one_kv_head": True},
    "memory": {"attn_num_mem_kv": 3},
    "macaron": {"macaron": True},
    "gate-residual": {"gate_residual": True},
    "scalenorm": {"use_scalenorm": True},
}.items():
    add(
        "x_transformers",
        name,
        lambda xt, more=more: (
            xt.TransformerWrapper(**XT, attn_layers=xt.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **more)),
            tokens(),
        ),
    )
add(
    "x_transformers",
    "encoder",
    lambda xt: (
        xt.TransformerWrapper(**XT, attn_layers=xt.Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)),
        tokens(),
    ),
)

VIT = {"image_size": 16, "patch_size": 4, "num_classes": 3, "dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16}
for module in (
    "vit",
    "simple_vit",
    "deepvit",
    "vit_1d",
    "vit_with_patch_merger",
    "simple_vit_with_qk_norm",
    "vit_for_small_dataset",
    "parallel_vit",
    "simple_vit_with_register_tokens",
    "normalized_vit",
):
    kind = {
        "vit": "ViT",
        "simple_vit": "SimpleViT",
        "deepvit": "DeepViT",
        "vit_1d": "ViT",
        "parallel_vit": "ViT",
        "simple_vit_with_qk_norm": "SimpleViT",
        "vit_for_small_dataset": "ViT",
        "vit_with_patch_merger": "ViT",
        "simple_vit_with_register_tokens": "SimpleViT",
        "normalized_vit": "nViT",
    }[module]
    changed = dict(VIT)
    if module == "vit_1d":
        changed = {**changed, "seq_len": 16}
        del changed["image_size"]
    add(
        "vit_pytorch",
        module,
        lambda vit, module=module, kind=kind, a=changed: (
            inner(vit, f"{module}.{kind}")(**a),
            torch.randn(P, 3, 16) if module == "vit_1d" else images(),
        ),
    )
add(
    "vit_pytorch",
    "cct",
    made(
        "cct.CCT",
        images,
        img_size=16,
        embedding_dim=16,
        n_conv_layers=1,
        num_layers=1,
        num_heads=2,
        mlp_ratio=1.0,
        num_classes=3,
    ),
)
add(
    "vit_pytorch",
    "cross_vit",
    made(
        "cross_vit.CrossViT",
        images,
        image_size=16,
        num_classes=3,
        depth=1,
        sm_dim=8,
        lg_dim=8,
        sm_patch_size=4,
        sm_enc_depth=1,
        sm_enc_heads=2,
        sm_enc_mlp_dim=8,
        sm_enc_dim_head=4,
        lg_patch_size=8,
        lg_enc_depth=1,
        lg_enc_heads=2,
        lg_enc_mlp_dim=8,
        lg_enc_dim_head=4,
        cross_attn_depth=1,
        cross_attn_heads=2,
        cross_attn_dim_head=4,
    ),
)

for name, more in {
    "Unet": {"decoder_channels": (8, 8, 8, 8, 4)},
    "UnetPlusPlus": {"decoder_channels": (8, 8, 8, 8, 4)},
    "PSPNet": {"psp_out_channels": 8},
    "FPN": {"decoder_pyramid_channels": 16, "decoder_segmentation_channels": 32},
    "DeepLabV3": {"decoder_channels": 8},
}.items():
    add(
        "segmentation_models_pytorch",
        name,
        lambda smp, name=name, more=more: (
            getattr(smp, name)("timm-mobilenetv3_small_minimal_100", encoder_weights=None, classes=1, **more),
            images(32),
        ),
    )

add("kornia", "TFeat", made("feature.TFeat", lambda: images(32, 1), pretrained=False))
add("e3nn", "Linear", made("o3.Linear", lambda: torch.randn(P, 10), "4x0e + 2x1o", "3x0e + 1x1o"))
add(
    "e3nn",
    "FullyConnectedTensorProduct",
    made(
        "o3.FullyConnectedTensorProduct",
        lambda: (torch.randn(P, 5), torch.randn(P, 4)),
        "2x0e + 1x1o",
        "1x0e + 1x1o",
        "2x0e + 1x1o",
    ),
)
add(
    "e3nn",
    "Gate",
    lambda e3nn: (
        nn.Sequential(
            inner(e3nn, "o3.Linear")("3x0e+2x1o", "2x0e+2x0e+2x1o"),
            inner(e3nn, "nn.Gate")("2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o"),
        ),
        torch.randn(P, 9),
    ),
)
add(
    "e3nn",
    "NormActivation",
    lambda e3nn: (
        nn.Sequential(
            inner(e3nn, "o3.Linear")("2x0e+2x1o", "2x0e+2x1o"),
            inner(e3nn, "nn.NormActivation")("2x0e+2x1o", torch.sigmoid),
        ),
        torch.randn(P, 8),
    ),
)

add(
    "neuralop",
    "FNO1d",
    made(
        "models.FNO",
        lambda: torch.randn(P, 2, 12),
        n_modes=(4,),
        hidden_channels=4,
        in_channels=2,
        out_channels=1,
        n_layers=2,
    ),
)
add(
    "neuralop",
    "FNO2d",
    made(
        "models.FNO", lambda: images(8, 1), n_modes=(4, 4), hidden_channels=4, in_channels=1, out_channels=1, n_layers=2
    ),
)
add(
    "neuralop",
    "TFNO",
    made(
        "models.TFNO",
        lambda: images(8, 1),
        n_modes=(4, 4),
        hidden_channels=4,
        in_channels=1,
        out_channels=1,
        n_layers=1,
        factorization="tucker",
        rank=0.5,
    ),
)
add(
    "tltorch",
    "FactorizedLinear",
    made("FactorizedLinear", lambda: torch.randn(P, 6), (2, 3), (2, 2), bias=True, factorization="blocktt", rank=2),
)

for name, more in {
    "MAF": {},
    "NICE": {},
    "NSF": {"bins": 3},
    "RealNVP": {},
    "NAF": {},
    "UNAF": {},
    "GF": {},
    "SOSPF": {},
    "BPF": {},
    "CNF": {},
}.items():
    add(
        "zuko",
        name,
        lambda zuko, name=name, more=more: (
            Called(
                inner(zuko, f"flows.{name}")(
                    3,
                    2,
                    **(
                        {"transforms": 1, "hidden_features": (6,)}
                        if name not in ("CNF",)
                        else {"hidden_features": (6,)}
                    ),
                    **more,
                ),
                lambda m, x, c: m(c).log_prob(x)[:, None],
            ),
            (torch.rand(P, 3), torch.randn(P, 2)),
        ),
        tolerance=1e-6 if name == "CNF" else 1e-9,
        refused="steps|tolerance" if name == "CNF" else "",
    )

add("kan", "KAN", made("KAN", lambda: torch.rand(P, 3), width=[3, 4, 2], grid=3, k=3, auto_save=False, device="cpu"))
add("kan", "MLP", made("MLP.MLP", lambda: torch.rand(P, 3), width=[3, 4, 2], device="cpu"))

add(
    "diffusers",
    "UNet2DModel",
    made(
        "UNet2DModel",
        lambda: (images(8, 1), torch.randint(100, (P,))),
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
)
add(
    "diffusers",
    "Transformer2DModel",
    lambda d: (
        Called(
            d.DiTTransformer2DModel(
                num_attention_heads=2,
                attention_head_dim=4,
                in_channels=1,
                num_layers=1,
                sample_size=8,
                patch_size=2,
                num_embeds_ada_norm=10,
                norm_num_groups=1,
            ),
            lambda m, x, t, c: m(x, timestep=t, class_labels=c),
        ),
        (images(8, 1), torch.randint(100, (P,)), torch.randint(10, (P,))),
    ),
)
add(
    "diffusers",
    "AutoencoderKL",
    made(
        "AutoencoderKL",
        lambda: images(8, 1),
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=1,
        norm_num_groups=4,
    ),
)
add(
    "diffusers",
    "VQModel",
    made(
        "VQModel",
        lambda: images(8, 1),
        in_channels=1,
        out_channels=1,
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=2,
        num_vq_embeddings=6,
        norm_num_groups=4,
    ),
)
add(
    "diffusers",
    "UNet2DConditionModel",
    made(
        "UNet2DConditionModel",
        lambda: (images(8, 1), torch.randint(100, (P,)), torch.randn(P, 3, 6)),
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        cross_attention_dim=6,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
)
add(
    "rtdl_revisiting_models",
    "MLP",
    made("MLP", lambda: torch.randn(P, 4), d_in=4, d_out=2, n_blocks=2, d_block=6, dropout=0.1),
)
add(
    "rtdl_revisiting_models",
    "ResNet",
    made(
        "ResNet",
        lambda: torch.randn(P, 4),
        d_in=4,
        d_out=2,
        n_blocks=1,
        d_block=6,
        d_hidden=None,
        d_hidden_multiplier=2.0,
        dropout1=0.1,
        dropout2=0.0,
    ),
)
add(
    "rtdl_revisiting_models",
    "FTTransformer",
    made(
        "FTTransformer",
        lambda: (torch.randn(P, 3), torch.randint(2, (P, 2))),
        n_cont_features=3,
        cat_cardinalities=[4, 2],
        d_out=2,
        n_blocks=1,
        d_block=8,
        attention_n_heads=2,
        attention_dropout=0.1,
        ffn_d_hidden=None,
        ffn_d_hidden_multiplier=2.0,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    ),
)
add(
    "rtdl_num_embeddings",
    "PeriodicEmbeddings",
    lambda r: (
        nn.Sequential(r.PeriodicEmbeddings(4, 6, lite=False), nn.Flatten(), nn.Linear(24, 2)),
        torch.randn(P, 4),
    ),
)
add(
    "rtdl_num_embeddings",
    "PiecewiseLinearEmbeddings",
    lambda r: (
        nn.Sequential(
            r.PiecewiseLinearEmbeddings([torch.linspace(-3, 3, 5)] * 4, 6, activation=False, version="B"),
            nn.Flatten(),
            nn.Linear(24, 2),
        ),
        torch.randn(P, 4),
    ),
)

add(
    "gpytorch",
    "RBFKernel",
    lambda g: (
        Called(
            inner(g, "kernels.ScaleKernel")(inner(g, "kernels.RBFKernel")(ard_num_dims=3)),
            lambda m, x: m(x, torch.linspace(-1, 1, 6).view(2, 3).to(x)).to_dense(),
        ),
        torch.randn(P, 3),
    ),
)
add(
    "gpytorch",
    "MaternKernel",
    lambda g: (
        Called(
            inner(g, "kernels.MaternKernel")(nu=2.5),
            lambda m, x: m(x, torch.linspace(-1, 1, 6).view(2, 3).to(x)).to_dense(),
        ),
        torch.randn(P, 3),
    ),
)
add(
    "botorch",
    "SingleTaskGP",
    lambda b: (
        Called(
            inner(b, "models.SingleTaskGP")(torch.rand(6, 2).double(), torch.randn(6, 1).double()),
            lambda m, x: m(x[:, None]).mean,
        ),
        torch.rand(P, 2),
    ),
)
add("pyro", "AutoRegressiveNN", made("nn.AutoRegressiveNN", lambda: torch.randn(P, 3), 3, [6], param_dims=[2]))
add("pyro", "DenseNN", made("nn.DenseNN", lambda: torch.randn(P, 3), 3, [6], param_dims=[2]))

for name, more in {
    "UNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (4, 8), "strides": (2,)},
    "BasicUNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "features": (4, 4, 4, 4, 4, 4)},
    "AttentionUnet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (4, 8), "strides": (2,)},
    "SegResNet": {
        "spatial_dims": 2,
        "init_filters": 8,
        "in_channels": 1,
        "out_channels": 1,
        "blocks_down": (1, 1),
        "blocks_up": (1,),
    },
    "DenseNet": {
        "spatial_dims": 2,
        "in_channels": 1,
        "out_channels": 3,
        "init_features": 8,
        "growth_rate": 4,
        "block_config": (1, 1),
    },
    "HighResNet": None,
    "AutoEncoder": {"spatial_dims": 2, "in_channels": 1, "out_channels": 1, "channels": (4, 8), "strides": (2, 2)},
    "FullyConnectedNet": {"in_channels": 5, "out_channels": 2, "hidden_channels": (6,)},
    "Classifier": {"in_shape": (1, 32, 32), "classes": 2, "channels": (4, 4), "strides": (2, 2)},
    "VNet": None,
    "ViT": {
        "in_channels": 1,
        "img_size": 16,
        "patch_size": 4,
        "hidden_size": 16,
        "mlp_dim": 16,
        "num_layers": 1,
        "num_heads": 2,
        "spatial_dims": 2,
    },
}.items():
    if more is not None:
        add(
            "monai",
            name,
            lambda monai, name=name, more=more: (
                inner(monai, f"networks.nets.{name}")(**more),
                torch.randn(P, 5) if name == "FullyConnectedNet" else images(16 if name == "ViT" else 32, 1),
            ),
        )

add(
    "nflows",
    "MaskedAffineAutoregressive",
    made(
        "transforms.autoregressive.MaskedAffineAutoregressiveTransform", lambda: torch.randn(P, 3), 3, 6, num_blocks=1
    ),
)
add(
    "nflows",
    "RationalQuadratic",
    made(
        "transforms.autoregressive.MaskedPiecewiseRationalQuadraticAutoregressiveTransform",
        lambda: torch.randn(P, 3),
        3,
        6,
        num_blocks=1,
        num_bins=3,
        tails="linear",
    ),
)
add("nflows", "LULinear", made("transforms.lu.LULinear", lambda: torch.randn(P, 3), 3, identity_init=False))
add(
    "nflows",
    "ActNorm-fresh",
    lambda n: (
        nn.Sequential(
            Called(inner(n, "transforms.normalization.ActNorm")(3), lambda m, x: (m.train(), m(x)[0])[1]),
            nn.Linear(3, 2),
        ),
        torch.randn(P, 3),
    ),
    refused="rewrites",
)
add(
    "normflows",
    "MaskedAffineFlow",
    lambda n: (
        Called(inner(n, "flows.AffineCouplingBlock")(inner(n, "nets.MLP")([2, 6, 4])), lambda m, x: m(x)[0]),
        torch.randn(P, 4),
    ),
)
add("normflows", "ActNorm-fresh", made("flows.ActNorm", lambda: torch.randn(P, 3), 3), refused="rewrites")
add("normflows", "Planar", made("flows.Planar", lambda: torch.randn(P, 3), (3,)))
add("FrEIA", "SequenceINN", lambda f: (Called(_inn(f), lambda m, x: m(x)[0]), torch.randn(P, 4)))


def _inn(freia: Any) -> nn.Module:
    model = inner(freia, "framework.SequenceINN")(4)
    for _ in range(2):
        model.append(
            inner(freia, "modules.AllInOneBlock"),
            subnet_constructor=lambda i, o: nn.Sequential(nn.Linear(i, 6), nn.Tanh(), nn.Linear(6, o)),
        )
    return model


def _ode(package: Any, **settings: Any) -> nn.Module:
    field = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
    times = torch.linspace(0, 1, 5)

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = field

        def forward(self, x: Tensor) -> Tensor:
            return package.odeint(lambda t, y: self.field(y), x, times.to(x), **settings)[-1]

    return Ode()


for name in ("euler", "midpoint", "rk4", "explicit_adams", "heun3"):
    add("torchdiffeq", name, lambda t, name=name: (_ode(t, method=name), torch.randn(P, 3)))
add(
    "torchdiffeq",
    "dopri5",
    lambda t: (_ode(t, method="dopri5", rtol=1e-3, atol=1e-3), torch.randn(P, 3)),
    refused="tighten the tolerance",
)
add(
    "torchdiffeq",
    "implicit_adams",
    lambda t: (_ode(t, method="implicit_adams", rtol=1e-3, atol=1e-5, options={"max_iters": 10}), torch.randn(P, 3)),
    refused="tighten the tolerance",
)

for name in ("CfC", "LTC"):
    add(
        "ncps",
        name,
        lambda n, name=name: (
            Called(inner(n, f"torch.{name}")(3, inner(n, "wirings.AutoNCP")(8, 2)), lambda m, x: m(x)[0]),
            sequence(5, 3),
        ),
    )
add("performer_pytorch", "Performer", made("Performer", sequence, dim=8, depth=1, heads=2, dim_head=4, nb_features=6))
add("linformer", "Linformer", made("Linformer", sequence, dim=8, seq_len=8, depth=1, heads=2, k=4))
add(
    "reformer_pytorch",
    "Reformer",
    made("Reformer", sequence, dim=8, depth=1, heads=2, bucket_size=4),
    refused="random numbers|reversible|gradient|backward",
)
add(
    "perceiver_pytorch",
    "Perceiver",
    made(
        "Perceiver",
        lambda: torch.randn(P, 8, 8, 3),
        num_freq_bands=2,
        depth=1,
        max_freq=4.0,
        num_latents=4,
        latent_dim=8,
        cross_dim_head=4,
        latent_dim_head=4,
        latent_heads=2,
        num_classes=3,
    ),
)
add(
    "mlp_mixer_pytorch",
    "MLPMixer",
    made("MLPMixer", images, image_size=16, channels=3, patch_size=4, dim=8, depth=1, num_classes=3),
)
add(
    "g_mlp_pytorch",
    "gMLPVision",
    made("gMLPVision", images, image_size=16, patch_size=4, num_classes=3, dim=8, depth=1),
)
add("g_mlp_pytorch", "gMLP", made("gMLP", tokens, num_tokens=16, dim=8, depth=1, seq_len=8))
add(
    "nystrom_attention",
    "Nystromformer",
    made("Nystromformer", sequence, dim=8, dim_head=4, heads=2, depth=1, num_landmarks=4, pinv_iterations=6),
    refused="depend on the other samples",
)
add(
    "local_attention",
    "LocalTransformer",
    made(
        "LocalTransformer",
        tokens,
        num_tokens=16,
        max_seq_len=8,
        dim=8,
        depth=1,
        heads=2,
        dim_head=4,
        local_attn_window_size=4,
    ),
)
add(
    "linear_attention_transformer",
    "LinearAttentionTransformer",
    made("LinearAttentionTransformer", sequence, dim=8, depth=1, max_seq_len=8, heads=2),
)
add(
    "axial_attention",
    "AxialAttention",
    made("AxialAttention", lambda: images(6), dim=3, dim_index=1, heads=1, num_dimensions=2),
)
add("product_key_memory", "PKM", made("PKM", sequence, dim=8, heads=2, num_keys=8, topk=4, dim_head=8))
add("soft_moe_pytorch", "SoftMoE", made("SoftMoE", sequence, dim=8, seq_len=8, num_experts=2))
add(
    "tab_transformer_pytorch",
    "TabTransformer",
    lambda p: (
        Called(
            p.TabTransformer(
                categories=(4, 3), num_continuous=3, dim=8, dim_out=1, depth=1, heads=2, mlp_act=nn.ReLU()
            ),
            lambda m, c, x: m(c, x),
        ),
        (torch.randint(3, (P, 2)), torch.randn(P, 3)),
    ),
)
add(
    "tab_transformer_pytorch",
    "FTTransformer",
    made(
        "FTTransformer",
        lambda: (torch.randint(3, (P, 2)), torch.randn(P, 3)),
        categories=(4, 3),
        num_continuous=3,
        dim=8,
        dim_out=1,
        depth=1,
        heads=2,
    ),
)
add(
    "iTransformer",
    "iTransformer",
    made(
        "iTransformer",
        lambda: torch.randn(P, 6, 3),
        num_variates=3,
        lookback_len=6,
        dim=8,
        depth=1,
        heads=2,
        dim_head=4,
        pred_length=2,
    ),
)
add(
    "siren_pytorch",
    "SirenNet",
    made("SirenNet", lambda: torch.rand(P, 2), dim_in=2, dim_hidden=8, dim_out=3, num_layers=3),
)
add(
    "lambda_networks",
    "LambdaLayer",
    made("LambdaLayer", lambda: images(6), dim=3, dim_out=4, r=3, dim_k=4, heads=2, dim_u=2),
)
add(
    "bottleneck_transformer_pytorch",
    "BottleStack",
    made(
        "BottleStack",
        lambda: images(6, 4),
        dim=4,
        fmap_size=6,
        dim_out=8,
        proj_factor=2,
        heads=2,
        dim_head=4,
        num_layers=1,
        downsample=False,
    ),
)
add("egnn_pytorch", "EGNN", made("EGNN", lambda: (torch.randn(P, 4, 4), torch.randn(P, 4, 3)), dim=4, m_dim=4))
add("conformer", "Conformer", made("Conformer", sequence, dim=8, depth=1, dim_head=4, heads=2, conv_kernel_size=3))
add("efficientnet_pytorch", "b0", lambda p: (Called(p.EfficientNet(*_efficientnet(p)), lambda m, x: m(x)), images(32)))


def _efficientnet(package: Any) -> Any:
    utils = import_module("efficientnet_pytorch.utils")
    blocks, settings = utils.efficientnet(width_coefficient=0.2, depth_coefficient=0.1, num_classes=3)
    return blocks[:3], settings


add(
    "snntorch",
    "Leaky",
    lambda s: (
        Called(nn.ModuleList([nn.Linear(4, 5), s.Leaky(beta=0.9), nn.Linear(5, 2)]), _spiking),
        torch.randn(P, 4),
    ),
)
add(
    "snntorch",
    "Leaky-without-reset",
    lambda s: (
        _used(nn.Sequential(nn.Linear(4, 5), s.Leaky(beta=0.9, init_hidden=True), nn.Linear(5, 2)), torch.randn(5, 4)),
        torch.randn(P, 4),
    ),
    refused="reset it first|earlier pass",
)


def _spiking(m: Any, x: Tensor) -> Tensor:
    first, leaky, second = m
    memory = leaky.init_leaky()
    for _ in range(3):
        _, memory = leaky(first(x), memory)
    return second(memory)


def _used(model: nn.Module, x: Tensor) -> nn.Module:
    model(x)
    return model


add(
    "norse",
    "LIFCell",
    lambda n: (
        Called(
            nn.ModuleList([inner(n, "torch.module.lif.LIFCell")(4, 5), nn.Linear(5, 2)]),
            lambda m, x: m[1](m[0](x)[1].v),
        ),
        torch.randn(P, 4),
    ),
)
add(
    "spikingjelly",
    "LIFNode",
    lambda s: (
        nn.Sequential(nn.Linear(4, 5), inner(s, "activation_based.neuron.LIFNode")(), nn.Linear(5, 2)),
        torch.randn(P, 4),
    ),
)
add(
    "blitz", "BayesianLinear", made("modules.BayesianLinear", lambda: torch.randn(P, 4), 4, 2), refused="random numbers"
)
add(
    "torchbnn",
    "BayesLinear",
    made("BayesLinear", lambda: torch.randn(P, 4), prior_mu=0, prior_sigma=0.1, in_features=4, out_features=2),
    refused="random numbers",
)
add(
    "bayesian_torch",
    "LinearReparameterization",
    made("layers.LinearReparameterization", lambda: torch.randn(P, 4), 4, 2),
    refused="random numbers",
)
add(
    "stable_baselines3",
    "ActorCriticPolicy",
    lambda s: (Called(_policy(s), lambda m, x: m.action_net(m.mlp_extractor(x)[0])), torch.randn(P, 4)),
)


def _policy(package: Any) -> nn.Module:
    spaces = import_module("gymnasium.spaces")
    return inner(package, "common.policies.ActorCriticPolicy")(
        spaces.Box(-1, 1, (4,)), spaces.Discrete(3), lambda _: 1e-3, net_arch=[6]
    )


add(
    "geoopt",
    "PoincareBall",
    lambda g: (
        Called(
            nn.ParameterList([g.ManifoldParameter(torch.randn(3) * 0.1, manifold=g.PoincareBall())]),
            lambda m, x: g.PoincareBall().dist(m[0], 0.1 * torch.tanh(x))[:, None],
        ),
        torch.randn(P, 3),
    ),
)
add(
    "pytorch_tcn",
    "TCN",
    made("TCN", lambda: torch.randn(P, 2, 8), 2, [4, 4], kernel_size=2, use_norm="weight_norm", causal=True),
)
add(
    "asteroid_filterbanks",
    "STFT",
    lambda p: (p.Encoder(p.FreeFB(n_filters=4, kernel_size=4, stride=2)), torch.randn(P, 1, 16)),
)
add(
    "asteroid_filterbanks",
    "ParamSinc",
    lambda p: (p.Encoder(p.ParamSincFB(n_filters=4, kernel_size=5, stride=2)), torch.randn(P, 1, 16)),
)
add(
    "mambapy",
    "Mamba",
    lambda m: (inner(m, "mamba.Mamba")(inner(m, "mamba.MambaConfig")(d_model=8, n_layers=1, d_state=4)), sequence()),
)
add(
    "mambapy",
    "Mamba-sequential",
    lambda m: (
        inner(m, "mamba.Mamba")(inner(m, "mamba.MambaConfig")(d_model=8, n_layers=1, d_state=4, pscan=False)),
        sequence(),
    ),
)
add(
    "fft_conv_pytorch",
    "FFTConv1d",
    made("FFTConv1d", lambda: torch.randn(P, 2, 8), 2, 3, 3, bias=True),
    tolerance=IN_SINGLE,
)
add("fft_conv_pytorch", "FFTConv2d", made("FFTConv2d", lambda: images(6, 2), 2, 3, 3, bias=True), tolerance=IN_SINGLE)
add(
    "complexPyTorch",
    "ComplexLinear",
    lambda c: (
        Called(
            inner(c, "complexLayers.ComplexLinear")(4, 3),
            lambda m, x: m(x.to(torch.complex128 if x.dtype == torch.float64 else torch.complex64)).abs(),
        ),
        torch.randn(P, 4),
    ),
    tolerance=IN_SINGLE,
)
add(
    "entmax",
    "sparsemax",
    lambda e: (nn.Sequential(nn.Linear(4, 6), e.Sparsemax(dim=-1), nn.Linear(6, 2)), torch.randn(P, 4)),
)
add(
    "entmax",
    "entmax15",
    lambda e: (nn.Sequential(nn.Linear(4, 6), e.Entmax15(dim=-1), nn.Linear(6, 2)), torch.randn(P, 4)),
)
add(
    "colt5_attention",
    "ConditionalRoutedFeedForward",
    made("ConditionalRoutedFeedForward", sequence, dim=8, light_ff_mult=0.5, heavy_ff_mult=1, num_heavy_tokens=2),
)
add(
    "h_transformer_1d",
    "HTransformer1D",
    made(
        "HTransformer1D",
        lambda: tokens(16),
        num_tokens=16,
        dim=8,
        depth=1,
        max_seq_len=16,
        heads=2,
        dim_head=4,
        block_size=4,
    ),
)
add(
    "mega_pytorch",
    "Mega",
    made(
        "Mega",
        tokens,
        num_tokens=16,
        dim=8,
        depth=1,
        ema_heads=2,
        attn_dim_qk=4,
        attn_dim_value=8,
        laplacian_attn_fn=True,
    ),
)
add(
    "xlstm",
    "mLSTM",
    lambda x: (
        x.xLSTMBlockStack(
            x.xLSTMBlockStackConfig(
                mlstm_block=x.mLSTMBlockConfig(mlstm=x.mLSTMLayerConfig(num_heads=2)),
                context_length=8,
                num_blocks=1,
                embedding_dim=8,
            )
        ),
        sequence(),
    ),
)
add("st_moe_pytorch", "MoE", made("MoE", sequence, dim=8, num_experts=2, gating_top_n=2))
add(
    "taylor_series_linear_attention",
    "TaylorSeriesLinearAttn",
    made("TaylorSeriesLinearAttn", sequence, dim=8, dim_head=4, heads=2),
)
add(
    "mixture_of_experts",
    "MoE",
    lambda m: (Called(m.MoE(dim=8, num_experts=2), lambda m, x: m(x)[0]), sequence()),
    refused="random|depend",
)
add(
    "monotonenorm",
    "direct_norm",
    lambda m: (
        nn.Sequential(m.direct_norm(nn.Linear(4, 6), kind="two-inf"), m.GroupSort(2), nn.Linear(6, 2)),
        torch.randn(P, 4),
    ),
)
add(
    "peft",
    "LoRA",
    lambda peft: (
        peft.get_peft_model(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), peft.LoraConfig(r=2, target_modules=["0", "2"])
        ),
        torch.randn(P, 4),
    ),
)
for name in ("LoHaConfig", "LoKrConfig", "OFTConfig", "IA3Config", "VeraConfig", "FourierFTConfig", "BOFTConfig"):
    more = {
        "LoHaConfig": {"r": 2},
        "LoKrConfig": {"r": 2},
        "OFTConfig": {"r": 2, "oft_block_size": 0},
        "IA3Config": {"feedforward_modules": []},
        "VeraConfig": {"r": 2},
        "FourierFTConfig": {"n_frequency": 6},
        "BOFTConfig": {"boft_block_size": 2},
    }[name]
    add(
        "peft",
        name,
        lambda peft, name=name, more=more: (
            peft.get_peft_model(
                nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)),
                getattr(peft, name)(target_modules=["0", "2"] if name != "VeraConfig" else ["2"], **more),
            ),
            torch.randn(P, 4),
        ),
    )
add(
    "torchcde",
    "linear",
    lambda t: (
        Called(
            nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6)),
            lambda m, x: t.cdeint(
                X=t.CubicSpline(t.hermite_cubic_coefficients_with_backward_differences(x)),
                func=lambda time, z: m(z).view(-1, 3, 2),
                z0=x[:, 0].repeat(1, 2)[:, :3],
                t=torch.tensor([0.0, 3.0]).to(x),
                method="rk4",
                adjoint=False,
            )[:, -1],
        ),
        torch.randn(P, 4, 2),
    ),
)


def load(entry: Entry) -> tuple[nn.Module, Any]:
    try:
        package = import_module(entry.package)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{entry.package} cannot be imported: {error}")
    torch.manual_seed(0)
    return entry.build(package)


def in_double(model: nn.Module) -> nn.Module:
    """Convert complex weights, too, which `Module.double` leaves as they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return model


def to_double(x: Any) -> Any:
    return map_tensors(x, lambda t: t.double() if t.is_floating_point() else t)


def bits(model: nn.Module) -> dict[str, Any]:
    return {name: t.detach().clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}


def assert_close(found: Tensor, expected: Tensor, scale: Tensor, tolerance: float) -> None:
    assert float((found.double() - expected).abs().max()) <= tolerance * float(scale.abs().max())


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_measurements_equal_dense_jacobians(entry: Entry) -> None:
    model, x = load(entry)
    single = copy.deepcopy(model).float().eval() if not entry.refused else None
    model, x = in_double(model).eval(), to_double(x)
    if entry.refused:
        with pytest.raises(fl.FeatlearnError, match=entry.refused):
            fl.ntk(model, x, readout=three)
        return
    before = bits(model)
    session = fl.Session(model, x, readout=three)
    kernels = [fl.ntk(model, x, readout=three, outputs="full"), *(session.ntk(outputs="full") for _ in range(2))]
    diagonal = fl.quantities.ntk_diagonal(model, x, readout=three)
    after = bits(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    expected = dense_ntk(model, x, readout=three, outputs="full")
    assert expected.abs().max() > 0
    for kernel in kernels:
        assert_close(kernel, expected, expected, entry.tolerance)
    assert_close(diagonal, torch.einsum("ppcc->p", expected) / expected.shape[-1], expected, entry.tolerance)
    assert single is not None
    kernel = fl.ntk(
        single, map_tensors(x, lambda t: t.float() if t.is_floating_point() else t), readout=three, dtype=torch.float64
    )
    rounded = map_tensors(x, lambda t: t.float().double() if t.is_floating_point() else t)
    expected = dense_ntk(in_double(single), rounded, readout=three, outputs="mean")
    assert_close(kernel, expected, expected, entry.tolerance)


def test_there_are_many_models_of_many_packages() -> None:
    assert len(ENTRIES) >= 120
    assert len({entry.package for entry in ENTRIES}) >= 30
    assert len({entry.id for entry in ENTRIES}) == len(ENTRIES)
