// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server's reasons against the types offered in a Proposal.

use super::decline::{DeclineReason, SmcKind};
use crate::wire::clc::{Diagnosis, TypeReasons};

/// Reasons against offered types; `None` for a possible type or one not offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RejectedTypes {
    /// SMC-Dv2.
    pub smcd_v2: Option<DeclineReason>,
    /// SMC-Dv1.
    pub smcd_v1: Option<DeclineReason>,
    /// SMC-Rv2.
    pub smcr_v2: Option<DeclineReason>,
    /// SMC-Rv1.
    pub smcr_v1: Option<DeclineReason>,
}

impl RejectedTypes {
    /// The refusal of one type.
    pub fn of(&self, kind: SmcKind) -> Option<DeclineReason> {
        match kind {
            SmcKind::SmcdV2 => self.smcd_v2,
            SmcKind::SmcdV1 => self.smcd_v1,
            SmcKind::SmcrV2 => self.smcr_v2,
            SmcKind::SmcrV1 => self.smcr_v1,
        }
    }

    /// Notes why a type is not used.
    pub fn set(&mut self, kind: SmcKind, reason: DeclineReason) {
        *match kind {
            SmcKind::SmcdV2 => &mut self.smcd_v2,
            SmcKind::SmcdV1 => &mut self.smcd_v1,
            SmcKind::SmcrV2 => &mut self.smcr_v2,
            SmcKind::SmcrV1 => &mut self.smcr_v1,
        } = Some(reason);
    }

    /// Returns the match; notes a failure under the type.
    pub(super) fn keep<T>(&mut self, kind: SmcKind, found: Result<T, DeclineReason>) -> Option<T> {
        found.map_err(|reason| self.set(kind, reason)).ok()
    }

    /// The diagnosis of the whole Proposal: types are dismissed from the least to the most
    /// preferred one, so the last reason belongs to the best type offered (CLCV2-80).
    pub fn last(&self) -> DeclineReason {
        SmcKind::PREFERENCE
            .into_iter()
            .find_map(|kind| self.of(kind))
            .unwrap_or(DeclineReason::NothingOffered)
    }

    /// The reason per type in the format of Decline: zero for types not offered (CLCV2-79).
    pub fn type_reasons(&self) -> TypeReasons {
        let diagnosis = |reason: Option<DeclineReason>| {
            reason.map_or(Diagnosis::NONE, |reason| Diagnosis(reason.code().value()))
        };
        TypeReasons {
            smcd_v2: diagnosis(self.smcd_v2),
            smcd_v1: diagnosis(self.smcd_v1),
            smcr_v2: diagnosis(self.smcr_v2),
            smcr_v1: diagnosis(self.smcr_v1),
        }
    }
}
