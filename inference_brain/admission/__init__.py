"""Limits, fairness and overload: whether a request is served, and when."""

from inference_brain.admission.admission import Admission
from inference_brain.admission.place import Place
from inference_brain.admission.shared import Shared
from inference_brain.admission.single_flight import Followed
from inference_brain.admission.ticket import Reason, Rejected, Room, Ticket

__all__ = [
    "Admission",
    "Followed",
    "Place",
    "Reason",
    "Rejected",
    "Room",
    "Shared",
    "Ticket",
]
