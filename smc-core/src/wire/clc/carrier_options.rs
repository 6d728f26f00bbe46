// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Vendor Unique Experimental Options for an agreement on records ([`crate::wire::record`]).
//!
//! ```text
//! Proposal:  52 OUI (3) | 55 version | 56 features (2) | 58 number of a claim (2), or 0
//! extension: 40 version | 41 reserved | 42 features (2)
//! ```
//!
//! Accept and Confirm do not repeat the OUI (CLCV2-16): the answer's format belongs to the vendor
//! of the offered options. Version 1 has no claims, and zeros in their place.

use std::num::NonZeroU16;

use super::VendorOffer;
use crate::wire::WireError;

bitflags::bitflags! {
    /// An end's abilities beyond leaving a ring.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct CarrierFeatures: u16 {
        /// Returning to a ring by CLC records.
        const RETURN = 0x0001;
    }
}

/// The options of an end supporting records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CarrierOptions {
    version: u8,
    features: CarrierFeatures,
}

impl CarrierOptions {
    /// The vendor: an OUI with the locally administered bit (0x02 of the first byte), never
    /// assigned to a vendor.
    pub const OUI: [u8; 3] = *b"VIS";
    /// The version of these options. Since version 2 a Proposal may name a buffer
    /// ([`crate::wire::claim`]).
    pub const VERSION: u8 = 2;

    /// Options of this version.
    pub const fn new(features: CarrierFeatures) -> CarrierOptions {
        CarrierOptions { version: CarrierOptions::VERSION, features }
    }

    /// The version of the options.
    pub const fn version(&self) -> u8 {
        self.version
    }

    /// The features.
    pub const fn features(&self) -> CarrierFeatures {
        self.features
    }

    /// The common options of both ends.
    pub fn common(self, other: CarrierOptions) -> CarrierOptions {
        CarrierOptions {
            version: self.version.min(other.version),
            features: self.features & other.features,
        }
    }

    /// Whether a Proposal may name a buffer.
    pub const fn has_claims(&self) -> bool {
        self.version >= 2
    }

    /// The form of a client's Proposal, with the number of a claim if there is one.
    pub fn offer(self, claim: Option<NonZeroU16>) -> VendorOffer {
        let [high, low] = self.features.bits().to_be_bytes();
        let number = claim.filter(|_| self.has_claims()).map_or(0, NonZeroU16::get);
        let [number_high, number_low] = number.to_be_bytes();
        let options = [self.version, high, low, number_high, number_low];
        VendorOffer { oui: CarrierOptions::OUI, options }
    }

    /// The number of the claim in an offer of these options.
    pub fn claim_in(offer: &VendorOffer) -> Option<NonZeroU16> {
        let offered = CarrierOptions::from_offer(offer).ok().flatten()?;
        let [.., high, low] = offer.options();
        NonZeroU16::new(u16::from_be_bytes([high, low])).filter(|_| offered.has_claims())
    }

    /// The options in an offer; `None` if the offer is another vendor's. Unknown parts of a later
    /// version are ignored.
    ///
    /// # Errors
    /// [`WireError::CarrierVersion`] for version 0, [`WireError::CarrierReserved`] for nonzero
    /// reserved bits of a known version.
    pub fn from_offer(offer: &VendorOffer) -> Result<Option<CarrierOptions>, WireError> {
        let [version, high, low, number @ ..] = offer.options();
        if offer.oui() != CarrierOptions::OUI {
            return Ok(None);
        }
        if version == 0 {
            return Err(WireError::CarrierVersion(version));
        }
        let bits = u16::from_be_bytes([high, low]);
        let features = CarrierFeatures::from_bits_truncate(bits);
        let reserved = if version == 1 { number } else { [0; 2] };
        let is_known = version <= CarrierOptions::VERSION;
        if is_known && (reserved != [0; 2] || features.bits() != bits) {
            return Err(WireError::CarrierReserved { features: bits, reserved });
        }
        Ok(Some(CarrierOptions { version, features }))
    }

    /// The form of Accept and Confirm.
    pub const fn answer(self) -> [u8; 4] {
        let [high, low] = self.features.bits().to_be_bytes();
        [self.version, 0, high, low]
    }

    /// The options accepted by a server out of the `offered` ones; `None` if the server accepts
    /// none.
    ///
    /// # Errors
    /// [`WireError::CarrierVersion`] for version 0 or a version never offered,
    /// [`WireError::CarrierReserved`] for a nonzero reserved byte, [`WireError::CarrierFeatures`]
    /// for features never offered.
    pub fn from_answer(
        offered: CarrierOptions,
        answer: [u8; 4],
    ) -> Result<Option<CarrierOptions>, WireError> {
        let [version, reserved, high, low] = answer;
        if answer == [0; 4] {
            return Ok(None);
        }
        if !(1..=offered.version).contains(&version) {
            return Err(WireError::CarrierVersion(version));
        }
        let bits = u16::from_be_bytes([high, low]);
        if reserved != 0 {
            return Err(WireError::CarrierReserved { features: bits, reserved: [0, reserved] });
        }
        if bits & !offered.features.bits() != 0 {
            let offered = offered.features.bits();
            return Err(WireError::CarrierFeatures { got: bits, offered });
        }
        Ok(Some(CarrierOptions { version, features: CarrierFeatures::from_bits_truncate(bits) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETURNS: CarrierOptions = CarrierOptions::new(CarrierFeatures::RETURN);
    const STAYS: CarrierOptions = CarrierOptions::new(CarrierFeatures::empty());

    fn offered(options: [u8; 5]) -> Result<Option<CarrierOptions>, WireError> {
        CarrierOptions::from_offer(&VendorOffer::new(CarrierOptions::OUI, options).unwrap())
    }

    // Shows: CLCV2-14, CLCV2-16.
    #[test]
    fn options_are_written_and_read_byte_for_byte() {
        let claim = NonZeroU16::new(0x1234);
        assert_eq!(RETURNS.offer(None).oui(), [0x56, 0x49, 0x53]);
        assert_eq!(RETURNS.offer(None).options(), [2, 0, 1, 0, 0]);
        assert_eq!(RETURNS.offer(claim).options(), [2, 0, 1, 0x12, 0x34]);
        assert_eq!((RETURNS.answer(), STAYS.answer()), ([2, 0, 0, 1], [2, 0, 0, 0]));
        for (options, claim) in [(RETURNS, claim), (STAYS, None)] {
            let offer = options.offer(claim);
            assert_eq!(CarrierOptions::from_offer(&offer), Ok(Some(options)));
            assert_eq!(CarrierOptions::claim_in(&offer), claim);
            assert_eq!(CarrierOptions::from_answer(RETURNS, options.answer()), Ok(Some(options)));
        }
        assert_eq!(RETURNS.common(STAYS), STAYS);
    }

    #[test]
    fn the_vendor_is_locally_administered_and_no_group() {
        assert_eq!(CarrierOptions::OUI[0] & 0b11, 0b10);
    }

    // Shows: CLCV2-15.
    #[test]
    fn other_vendors_and_no_answer_are_no_options() {
        let other = VendorOffer::new([1, 2, 3], [0; 5]).unwrap();
        assert_eq!(CarrierOptions::from_offer(&other), Ok(None));
        assert_eq!(CarrierOptions::from_answer(RETURNS, [0; 4]), Ok(None));
    }

    #[test]
    fn each_way_of_being_wrong_has_its_error() {
        assert_eq!(offered([0, 0, 1, 0, 0]), Err(WireError::CarrierVersion(0)));
        let reserved = |features, reserved| WireError::CarrierReserved { features, reserved };
        assert_eq!(offered([1, 0, 1, 0, 4]), Err(reserved(1, [0, 4])));
        for version in [1, 2] {
            assert_eq!(offered([version, 0x80, 1, 0, 0]), Err(reserved(0x8001, [0, 0])));
        }
        let answered = |answer| CarrierOptions::from_answer(STAYS, answer);
        assert_eq!(answered([3, 0, 0, 0]), Err(WireError::CarrierVersion(3)));
        assert_eq!(answered([0, 0, 0, 1]), Err(WireError::CarrierVersion(0)));
        assert_eq!(answered([1, 7, 0, 0]), Err(reserved(0, [0, 7])));
        let features = WireError::CarrierFeatures { got: 1, offered: 0 };
        assert_eq!(answered([1, 0, 0, 1]), Err(features));
    }

    #[test]
    fn a_later_version_is_met_at_this_one() {
        let later = offered([3, 0xff, 0xff, 9, 9]).unwrap().unwrap();
        assert_eq!(later.common(RETURNS), RETURNS);
    }

    #[test]
    fn version_1_has_no_claims() {
        let first = offered([1, 0, 1, 0, 0]).unwrap().unwrap();
        assert!(!first.has_claims() && !RETURNS.common(first).has_claims());
        assert_eq!(first.offer(NonZeroU16::new(9)).options(), [1, 0, 1, 0, 0]);
        assert_eq!(CarrierOptions::claim_in(&first.offer(None)), None);
    }
}
