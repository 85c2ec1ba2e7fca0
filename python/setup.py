"""The tag of the wheel: it holds programs for one kind of machine, and runs with any Python."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class WithPrograms(Distribution):
    def has_ext_modules(self):
        return True


class ForAnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(distclass=WithPrograms, cmdclass={"bdist_wheel": ForAnyPython})
