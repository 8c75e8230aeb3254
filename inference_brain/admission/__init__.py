"""Limits, fairness and overload: whether a request is served, and when."""

from inference_brain.admission.admission import Admission
from inference_brain.admission.place import Place
from inference_brain.admission.ticket import Capacity, Reason, Rejected, Room, Ticket

__all__ = ["Admission", "Capacity", "Place", "Reason", "Rejected", "Room", "Ticket"]
