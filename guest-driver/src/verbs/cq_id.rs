//! The number of a completion queue, by which notices and asynchronous events name it.

/// Tells the completion queues of this process apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CqId(usize);

impl CqId {
    pub(super) fn from_number(number: usize) -> CqId {
        CqId(number)
    }
}
