//! A drawing backend of pixels with a built-in font, for machines without fonts.

use std::convert::Infallible;

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, RasterizedChar, get_raster};
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{
    BackendColor, BackendCoord, BackendTextStyle, DrawingBackend, DrawingErrorKind,
};

/// A picture, three bytes a pixel.
pub(super) struct Raster {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

/// What draws on a picture.
pub(super) struct RasterBackend<'a>(&'a mut Raster);

impl Raster {
    /// A white picture.
    pub(super) fn new((width, height): (u32, u32)) -> Raster {
        Raster { width, height, pixels: vec![0xff; width as usize * height as usize * 3] }
    }

    /// A backend for plotters.
    pub(super) fn backend(&mut self) -> RasterBackend<'_> {
        RasterBackend(self)
    }

    /// The picture as a PNG file.
    pub(super) fn to_png(&self) -> Vec<u8> {
        let mut header = [self.width.to_be_bytes(), self.height.to_be_bytes()].concat();
        // Eight bits, RGB, and the only methods there are; not interlaced.
        header.extend([8, 2, 0, 0, 0]);
        let mut lines = Vec::with_capacity(self.pixels.len() + self.height as usize);
        for line in self.pixels.chunks((self.width as usize * 3).max(1)) {
            // No filter: areas of one colour compress well as they are.
            lines.push(0);
            lines.extend_from_slice(line);
        }
        let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
        put_chunk(&mut file, *b"IHDR", &header);
        put_chunk(&mut file, *b"IDAT", &miniz_oxide::deflate::compress_to_vec_zlib(&lines, 6));
        put_chunk(&mut file, *b"IEND", &[]);
        file
    }

    fn blend(&mut self, (x, y): BackendCoord, color: BackendColor, coverage: f64) {
        let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else { return };
        if x >= self.width || y >= self.height {
            return;
        }
        let at = (y as usize * self.width as usize + x as usize) * 3;
        let Some(pixel) = self.pixels.get_mut(at..at + 3) else { return };
        let alpha = (color.alpha * coverage).clamp(0.0, 1.0);
        let (r, g, b) = color.rgb;
        for (old, new) in pixel.iter_mut().zip([r, g, b]) {
            let mixed = f64::from(*old) * (1.0 - alpha) + f64::from(new) * alpha;
            *old = mixed.round() as u8;
        }
    }
}

/// Length, name, data, and the CRC-32 of name and data.
fn put_chunk(file: &mut Vec<u8>, name: [u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    file.extend(name);
    file.extend_from_slice(data);
    file.extend(crc32(name.iter().chain(data)).to_be_bytes());
}

fn crc32<'a>(bytes: impl Iterator<Item = &'a u8>) -> u32 {
    !bytes.fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg())
        })
    })
}

/// The closest of the sizes there are.
fn font(size: f64) -> (FontWeight, RasterHeight) {
    match size {
        size if size < 18.0 => (FontWeight::Regular, RasterHeight::Size16),
        size if size < 22.0 => (FontWeight::Regular, RasterHeight::Size20),
        _ => (FontWeight::Bold, RasterHeight::Size24),
    }
}

fn glyph(c: char, size: f64) -> Option<RasterizedChar> {
    let (weight, height) = font(size);
    get_raster(c, weight, height).or_else(|| get_raster('?', weight, height))
}

fn extent(text: &str, size: f64) -> (i32, i32) {
    let (width, height) = glyph(' ', size).map_or((0, 0), |g| (g.width(), g.height()));
    ((text.chars().count() * width) as i32, height as i32)
}

impl DrawingBackend for RasterBackend<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        (self.0.width, self.0.height)
    }

    fn ensure_prepared(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn present(&mut self) -> Result<(), DrawingErrorKind<Infallible>> {
        Ok(())
    }

    fn draw_pixel(
        &mut self,
        point: BackendCoord,
        color: BackendColor,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        self.0.blend(point, color, 1.0);
        Ok(())
    }

    fn draw_text<S: BackendTextStyle>(
        &mut self,
        text: &str,
        style: &S,
        (x, y): BackendCoord,
    ) -> Result<(), DrawingErrorKind<Infallible>> {
        let size = style.size();
        let (width, height) = extent(text, size);
        let mut left = match style.anchor().h_pos {
            HPos::Left => x,
            HPos::Center => x - width / 2,
            HPos::Right => x - width,
        };
        let top = match style.anchor().v_pos {
            VPos::Top => y,
            VPos::Center => y - height / 2,
            VPos::Bottom => y - height,
        };
        for glyph in text.chars().filter_map(|c| glyph(c, size)) {
            for (dy, row) in (0..).zip(glyph.rows()) {
                for (dx, intensity) in (0..).zip(row) {
                    let coverage = f64::from(*intensity) / 255.0;
                    self.0.blend((left + dx, top + dy), style.color(), coverage);
                }
            }
            left += glyph.width() as i32;
        }
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        style: &S,
    ) -> Result<(u32, u32), DrawingErrorKind<Infallible>> {
        let (width, height) = extent(text, style.size());
        Ok((width.unsigned_abs(), height.unsigned_abs()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLACK: BackendColor = BackendColor { alpha: 1.0, rgb: (0, 0, 0) };

    #[test]
    fn pixels_outside_are_left_out() {
        let mut raster = Raster::new((2, 2));
        for point in [(-1, 0), (0, -1), (2, 0), (0, 2)] {
            raster.blend(point, BLACK, 1.0);
        }
        assert!(raster.pixels.iter().all(|byte| *byte == 0xff));
        raster.blend((1, 1), BLACK, 0.5);
        assert_eq!(raster.pixels[9..], [128; 3]);
    }

    #[test]
    fn the_checksum_is_that_of_png() {
        // The CRC of every PNG file's last chunk.
        assert_eq!(crc32(b"IEND".iter()), 0xae42_6082);
    }

    #[test]
    fn text_leaves_ink() {
        let (width, height) = extent("MiB/s", 16.0);
        assert!(width > 0 && height == 16);
        assert!(glyph('M', 16.0).unwrap().pixels().iter().any(|byte| *byte > 200));
    }
}
