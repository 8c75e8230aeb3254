"""Why a prompt was hit or missed: asked of drivers, for members of its org."""
