"""The demo: two RLVR jobs learn on one worker; measured alone, shared, and with the group held through stalls."""
