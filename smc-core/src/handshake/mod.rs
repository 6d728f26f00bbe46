//! CLC as it happens: one struct per awaited message, pure negotiation, the decline table.
