"""Objects through which programs written for other systems train on an insitu backend."""
