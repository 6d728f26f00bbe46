//! One socket: cursors, window, ring spans, urgent data, close states.
