"""The small trained model that comes with the package, as a Hugging Face directory."""

from pathlib import Path

DEMO_DIRECTORY = Path(__file__).parent
