"""The package is described in pyproject.toml. This only makes the README's relative links absolute, for PyPI."""

import re

from setuptools import setup
from setuptools.dist import Distribution


class WithAbsoluteLinks(Distribution):
    def parse_config_files(self, *args, **kwargs):
        super().parse_config_files(*args, **kwargs)
        text, home = self.metadata.long_description, self.metadata.project_urls["Homepage"]
        text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/raw/main/", text)
        self.metadata.long_description = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", text)


setup(distclass=WithAbsoluteLinks)
