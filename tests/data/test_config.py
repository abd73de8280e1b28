from omegaconf import OmegaConf

from data.config import DataConfig


def test_a_file_can_name_a_mixture():
    values = OmegaConf.create("root: prepared\nmixture: {first: 0.7, second: 3}")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), values))
    assert config == DataConfig(root="prepared", mixture={"first": 0.7, "second": 3.0})
