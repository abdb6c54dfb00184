"""Posteriors against laplace-torch, where it is installed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import featlearn as fl

laplace = pytest.importorskip("laplace")


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_a_posterior_is_that_of_laplace_torch(loss: str):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        x, x2, labels = torch.randn(9, 4).double(), torch.randn(5, 4).double(), torch.randint(3, (9,))
    kind, y = ("regression", model(x).detach().sin()) if loss == "mse" else ("classification", labels)
    noise: dict[str, Any] = {"noise": 0.3} if loss == "mse" else {}
    settings = {"sigma_noise": 0.3} if loss == "mse" else {}
    theirs = laplace.Laplace(
        model,
        kind,
        subset_of_weights="all",
        hessian_structure="full",
        prior_precision=torch.tensor(2.0).double(),
        backend=laplace.curvature.CurvlinopsGGN,
        **settings,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=9))
    ours = fl.posterior(model, x, y, loss=loss, prior=2.0, **noise)
    prediction = ours.predict(x2)
    mean, covariance = theirs._glm_predictive_distribution(x2)
    torch.testing.assert_close(prediction.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prediction.covariance, covariance, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.log_marginal_likelihood, float(theirs.log_marginal_likelihood()), rtol=1e-6, atol=0)
