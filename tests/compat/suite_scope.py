"""Which of laplace-torch's test files are about its public classes and functions, decided before they were run."""

IN_SCOPE = {
    "test_baselaplace.py": "posteriors over all weights",
    "test_lllaplace.py": "posteriors over the last layer",
    "test_subnetlaplace.py": "subnetworks and their masks",
    "test_subset_params.py": "frozen parameters",
    "test_laplace.py": "the function Laplace(...)",
    "test_serialization.py": "state_dict and pickles",
    "test_functional_laplace.py": "the posterior in function space against the full one",
    "test_matrix.py": "Kron and KronDecomposed",
    "test_metrics.py": "RunningNLLMetric",
    "test_utils.py": "functions of laplace.utils",
    "test_feature_extractor.py": "FeatureExtractor",
}
OUT_OF_SCOPE = {
    "test_curv_backends_asdfghjkl.py": "what a backend computes for one batch",
    "test_curv_backends_asdl.py": "what a backend computes for one batch",
    "test_curv_backends_backpack.py": "what a backend computes for one batch",
    "test_curv_backends_curvlinops.py": "what a backend computes for one batch",
    "test_curv_backends_interface.py": "what a backend computes for one batch",
    "test_jacobians.py": "the Jacobians of a backend",
    "test_functional_laplace_unit.py": "private methods that fill kernel matrices block by block",
}

KNOWN = {
    "test_baselaplace.py::test_dict_data": "expects BackPACK, and diag with CurvlinopsEF, to refuse mappings",
    "test_subset_params.py::test_incompatible_backend": "expects BackPACK to refuse frozen weights",
    "test_matrix.py::test_bmm_dense": "asks a backend for Kronecker factors",
    "test_feature_extractor.py::test_feature_extractor": "needs the networks of torchvision",
    "test_serialization.py::test_map_location": "torch.load refuses pickled objects since torch 2.6, there too",
}
"""Why the other tests in scope do not pass, by the beginning of their names."""
