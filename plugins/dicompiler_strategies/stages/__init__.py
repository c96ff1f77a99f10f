"""Stages of a pipeline: consecutive whole layers on one device, or on several devices that take frames in turn."""
