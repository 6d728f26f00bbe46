// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a dialogue ends before its last step.

use super::Verdict;
use crate::link::Event;
use crate::message::Kind;
use crate::stream::StreamFailure;

/// A verdict, and why.
#[derive(Debug)]
pub(super) struct CaseEnd {
    pub(super) verdict: Verdict,
    pub(super) says: String,
    /// Whether a busy machine explains the verdict: see [`is_of_load`].
    pub(super) is_of_load: bool,
}

impl From<(Verdict, String)> for CaseEnd {
    fn from((verdict, says): (Verdict, String)) -> CaseEnd {
        CaseEnd { verdict, says, is_of_load: false }
    }
}

impl From<StreamFailure> for CaseEnd {
    fn from(failure: StreamFailure) -> CaseEnd {
        CaseEnd { verdict: Verdict::Fail, says: failure.says, is_of_load: failure.is_late }
    }
}

/// Diagnosis of a Decline for want of memory.
const NO_MEMORY: u64 = 0x0101_0000;
/// Upper half of the diagnoses of other internal failures, such as a buffer not registered.
const INTERNAL: u64 = 0x0999;

/// Whether a busy machine may explain an unexpected event: silence; a Proposal, namely the suite's
/// own Proposal echoed as data after arriving too late at a server; or a Decline for a reason
/// unrelated to the messages, sent by either end before Confirm.
pub(super) fn is_of_load(event: &Event) -> bool {
    match event {
        Event::Nothing => true,
        Event::Message(message) if message.kind == Kind::Proposal => true,
        Event::Message(message) if message.kind == Kind::Decline => {
            let diagnosis = message.number("diagnosis");
            diagnosis == NO_MEMORY || diagnosis >> 16 == INTERNAL
        }
        _ => false,
    }
}

/// The end of a case at an unexpected event.
pub(super) fn fail_at<T>(event: &Event, says: String) -> Result<T, CaseEnd> {
    Err(CaseEnd { verdict: Verdict::Fail, says, is_of_load: is_of_load(event) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::encode;
    use crate::value::Scope;

    #[test]
    fn only_silence_and_want_of_resources_may_be_due_to_load() {
        let decline = |diagnosis: u32| {
            let table = format!("message = 'decline'\ndiagnosis = {diagnosis}").parse().unwrap();
            Event::Message(encode(&table, &Scope::default()).unwrap())
        };
        for diagnosis in [0x0101_0000, 0x0999_0003] {
            assert!(is_of_load(&decline(diagnosis)), "{diagnosis:#x}");
        }
        for diagnosis in [0x0303_0001, 0x0402_0000, 0x0998_ffff] {
            assert!(!is_of_load(&decline(diagnosis)), "{diagnosis:#x}");
        }
        assert!(is_of_load(&Event::Nothing));
        let table = "message = 'proposal'\nform = 1\nv1_types = 0".parse().unwrap();
        assert!(is_of_load(&Event::Message(encode(&table, &Scope::default()).unwrap())));
        assert!(!is_of_load(&Event::End) && !is_of_load(&Event::Data(vec![1])));
    }
}
