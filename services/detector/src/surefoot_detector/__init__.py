"""Surefoot detector: turns numbers of steps into anomalies.

Reads StepCompleted and AttemptStarted from surefoot:events (group detector); writes AnomalyDetected, AnomalyCleared and
StepsCleared to it; owns no table and no file. `detector.Detector` is the pure core.
"""
