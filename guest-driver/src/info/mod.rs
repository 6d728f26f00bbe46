//! What there is right now, for tools and for people: connections, links, link groups and RNICs.

mod connection;
mod fallback;
mod smcr;
mod snapshot;

pub use connection::{Facts, SmcDFacts};
pub use fallback::Fallback;
pub use smcr::{GroupFacts, LinkFacts, RnicFacts, SmcRFacts, gid as show_gid};
pub use snapshot::{ConnectionFacts, Cursors};
