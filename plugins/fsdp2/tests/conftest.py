"""What several tests of the package share."""

from support.fixtures import write as write
