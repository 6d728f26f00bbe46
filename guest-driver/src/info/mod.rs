//! What there is right now, for tools and for people: connections, links, link groups and RNICs.

mod connection;
mod fallback;
mod smcr;
mod snapshot;

pub use connection::{ConnectionInfo, SmcdInfo};
pub use fallback::Fallback;
pub use smcr::{LinkGroupInfo, LinkInfo, RnicInfo, SmcrInfo, gid as show_gid};
pub use snapshot::{ConnectionSnapshot, Cursors};
