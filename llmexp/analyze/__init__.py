"""From finished runs to evidence: pairs, effects, intervals, verdicts and claims."""
