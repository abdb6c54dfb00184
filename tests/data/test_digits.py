import pytest
import torch
from sklearn.datasets import load_digits

import featlearn as fl


def test_digits_are_the_file_scaled_to_the_unit_interval():
    data = fl.data.digits()
    file = load_digits()
    assert data.x.dtype == torch.float32
    assert data.labels.dtype == torch.int64
    assert data.x.shape == (1797, 64)
    assert data.x.min() == 0
    assert data.x.max() == 1
    assert torch.equal(data.x.view(-1, 8, 8) * 16, torch.from_numpy(file.images).float())
    assert torch.equal(data.labels, torch.from_numpy(file.target))


def test_train_and_test_part_the_whole_and_hold_every_class():
    whole, train, test = (fl.data.digits(split) for split in ("all", "train", "test"))
    assert (len(train.x), len(test.x)) == (1500, 297)
    assert torch.equal(torch.cat([train.x, test.x]), whole.x)
    assert torch.equal(torch.cat([train.labels, test.labels]), whole.labels)
    assert set(train.labels.tolist()) == set(test.labels.tolist()) == set(range(10))


def test_two_reads_share_no_memory():
    first = fl.data.digits()
    first.x.zero_()
    assert fl.data.digits().x.max() == 1


def test_a_wrong_split_is_named_with_what_was_expected():
    with pytest.raises(fl.FeatlearnError, match="split is 'valid', expected one of 'all', 'train', 'test'"):
        fl.data.digits("valid")


def test_one_hot_targets_point_at_the_label():
    data = fl.data.Labeled(x=torch.zeros(3, 2), labels=torch.tensor([2, 0, 2]), classes=4)
    expected = torch.tensor([[0.0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 1, 0]])
    assert torch.equal(data.one_hot(), expected)
    assert torch.equal(data.one_hot(centered=True, dtype=torch.float64), expected.double() - 0.25)


def test_samples_unpack_into_inputs_and_labels():
    data = fl.data.digits("test")
    x, labels = data
    assert x is data.x
    assert labels is data.labels


def test_labels_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"labels have shape \(2,\), expected \(P,\) = \(3,\)"):
        fl.data.Labeled(x=torch.zeros(3, 5), labels=torch.zeros(2, dtype=torch.int64), classes=4)
