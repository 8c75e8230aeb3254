"""Which replica a request goes to: the one where its first token is expected soonest. Pure.

    rates = ModelRates()                                    # one for each model that is served
    flights = Flights()                                     # requests that were sent and not finished
    rates.settle(now)
    candidates = [
        Candidate("r1", hit_tokens=4096, load=flights.load("r1", now), rates=rates.of("r1"))
    ]
    choice = choose(Asked(tokens=9000, affinity=key), candidates, now, rng, rates.mode)
    flights.begin("req-1", choice, now)                     # it was sent
    flights.first_token("req-1", now)
    rates.observe(choice, Outcome(ttft_seconds=0.31, cached_tokens=4096), now)
    flights.end("req-1")

No clock, no I/O, no randomness of its own: the same arguments give the same choice.
"""

from inference_brain.choice.candidates import Asked, Candidate, Load, Path
from inference_brain.choice.choice import Choice, Mode, Why, choose
from inference_brain.choice.flights import Flights
from inference_brain.choice.model_rates import ModelRates
from inference_brain.choice.outcome import Outcome, Regret, regret
from inference_brain.choice.rates import Rates
from inference_brain.choice.sent import SentPrefixes

__all__ = [
    "Asked",
    "Candidate",
    "Choice",
    "Flights",
    "Load",
    "Mode",
    "ModelRates",
    "Outcome",
    "Path",
    "Rates",
    "Regret",
    "SentPrefixes",
    "Why",
    "choose",
    "regret",
]
