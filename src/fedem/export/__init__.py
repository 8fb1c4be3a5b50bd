"""Personal models as files: to be loaded again, or used where fedem is not installed."""

from fedem.export.folder import Exported, export_client, export_personal, load_exported
from fedem.export.formats import FORMATS, PersonalModule

__all__ = ["FORMATS", "Exported", "PersonalModule", "export_client", "export_personal", "load_exported"]
